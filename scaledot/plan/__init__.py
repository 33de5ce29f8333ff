"""What a training step of a large model takes on many devices, before anybody has them: `scaledot plan`.

XLA compiles one decoder layer for the mesh, with shapes instead of arrays, on CPU devices (`programs`, in a `child`
process that has as many). What devices send each other is read from the compiled program (`hlo`); what they compute
follows from the model (`models`) and the recipe (`products`). Times are bytes and operations over the rates of a device
(`rates`), memory is what the step keeps (`cost`). It is a model: rates say where they come from, and what is left out
is said in docs/notes/scaling.md.
"""
