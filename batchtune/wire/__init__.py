"""Bytes on the wire: HTTP/1.1, HTTP/2, gRPC and tensors, for both ends, without the TensorFlow runtime.

Produces bytes, and `signature.Signature`: the inputs and outputs of a model.
Start with `grpc.client_connection.GrpcClientConnection`, `grpc.server_connection.serve`,
`tfserving.tensors.encode_predict_request`.
"""
