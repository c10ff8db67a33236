"""What would the server do under other parameters or other traffic? Calibrated from a few measurements."""
