"""This package contains no tests."""

collect_ignore_glob = ["*"]
