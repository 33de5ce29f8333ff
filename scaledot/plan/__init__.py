"""Estimates time, communication and memory of a training step on many devices, without the devices: `scaledot plan`.

XLA compiles one decoder block for the mesh, from shapes alone, on CPU devices (`programs`, in a child process with as
many CPU devices as the mesh has: `compile_process`). Collectives and their bytes are read from the compiled HLO
(`hlo`); FLOPs and bytes of casts follow from the model (`models`) and the recipe (`gemm_kinds`). Times are bytes and
FLOPs over the rates of a device (`rates`); memory is weights, optimizer state and residuals (`cost`). It is a model,
not a measurement: every rate has its source, and docs/notes/scaling.md lists what is not modelled.
"""
