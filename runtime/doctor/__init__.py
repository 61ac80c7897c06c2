"""What `paged doctor` looks at: each check says what it found and, if need be, what to do."""
