"""Assignment of layers to stages, and of stages to devices."""
