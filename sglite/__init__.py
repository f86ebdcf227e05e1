"""sglite: a runtime for LLM programs with structured output."""
