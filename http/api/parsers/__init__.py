"""What models write, read as reasoning, content and tool calls: small machines over text."""
