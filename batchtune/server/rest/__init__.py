"""How is TensorFlow Serving's REST API answered? HTTP in, HTTP out."""
