"""The OpenAI API: its routes, and what they read and write."""
