"""What every format computes, to the bit. Pure functions of arrays; the public verbs are in `ops`."""
