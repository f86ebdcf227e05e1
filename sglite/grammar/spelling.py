"""How a JSON string is spelled: each character in one way (schema.values.string_text)."""

# One character of a string, as a regex.
UNIT = r'(?:[^"\\\x00-\x1f]|\\["\\bfnrt]|\\u00(?:0[0-7bef]|1[0-9a-f]))'
