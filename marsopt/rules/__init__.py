"""The algorithms: corrections times preconditioners, each a file that reads like its
algorithm box.

Symbols, here and everywhere: x parameter, g gradient, h reference gradient, c corrected
and clipped gradient, m and v moments, r moment of rows, u the matrix to orthogonalize,
o its orthogonal factor, t step, k = gamma beta1 / (1 - beta1).
"""
