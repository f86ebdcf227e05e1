"""Bodies of requests, one file an API. Unknown fields are refused by name: an option acts or says that it does not."""
