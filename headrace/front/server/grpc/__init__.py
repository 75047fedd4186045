"""The routes that need no model, over gRPC (extra `grpc`)."""
