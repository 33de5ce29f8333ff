"""Fuzzing of the readers of checkpoints: mutates valid files, and expects each to be read or to raise CheckpointError.

    python -m tests.fuzzing safetensors --count 100000 --seed 1
    python -m tests.fuzzing all --count 200000 --seed 1            # a million inputs, about an hour

One target per reader (`targets`). An input depends on the target, the seed and its number only, so that it can be
computed again. It *fails* if reading it raises anything but a CheckpointError that names the file, takes more than one
second of CPU time, or raises the peak memory of the process by more than 100 MB; its files are then written below
`build/fuzzing`, and the exit status is 1. Inputs that failed once are kept in `corpus`, one folder each, and are tried
first.

| module | holds |
|---|---|
| `mutation` | changes of bytes and of parsed JSON |
| `checkpoints`, `gguf_files` | small valid checkpoints as values, their mutation and their files |
| `targets` | inputs of each reader, and how it is called |
| `engine` | runs inputs within limits of time and memory |
"""
