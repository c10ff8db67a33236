"""What does one server with this scheduler do with this traffic? Compiled; knows nothing of measurements."""
