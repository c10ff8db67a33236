"""Tensors in KServe v2 (Triton, OpenVINO Model Server), over gRPC and REST."""
