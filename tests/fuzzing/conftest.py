"""This package contains no tests; tests/test_checkpoint_fuzz.py runs it."""

collect_ignore_glob = ["*"]
