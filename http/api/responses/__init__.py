"""OpenAI's Responses API: chat answers as typed items, which the server can remember."""
