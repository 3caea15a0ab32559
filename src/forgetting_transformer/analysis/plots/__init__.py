"""The figures of runs and evaluations, a file per subject.

A function draws one figure into the file `path`, whose suffix chooses the format (.png, .pdf, .svg), and writes
`conditions` at its foot. Losses are in nats per token.
"""
