"""From a model to its optimizer: roles of parameters, param groups, ``for_model``."""
