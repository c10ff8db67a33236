"""TensorFlow Serving's REST API: HTTP in, HTTP out."""
