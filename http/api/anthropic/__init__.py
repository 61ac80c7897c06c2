"""Anthropic's Messages API: chat answers as blocks of content."""
