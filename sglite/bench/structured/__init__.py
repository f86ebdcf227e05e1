"""`sglite bench structured`: what constraints cost, and what forced text gains."""
