"""What has the server done so far, in TensorFlow Serving's names and a few that those lack?"""
