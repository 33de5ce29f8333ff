"""Other libraries' names and signatures on this one's core; their users change an import line."""
