"""The names of gRPC's methods and codes that metrics count by: closed sets."""

from __future__ import annotations

GRPC_METHODS = (
    *("RenderChat", "RenderCompletion", "Tokenize", "Detokenize", "HealthCheck"),
    *("Generate", "GenerateStream", "Embed", "FlushCache", "StartProfile", "StopProfile", "Abort"),
    *("GetModelInfo", "GetServerInfo", "GetLoads", "GetTokenizer", "SubscribeKvEvents"),
    *("Shutdown", "LoadLora", "UnloadLora", "ListLoras", "GetKvEventSources", "PauseGeneration"),
    *("ResumeGeneration", "IsPaused", "Sleep", "WakeUp", "IsSleeping", "InitWeightTransferEngine"),
    *("StartWeightUpdate", "StartDraftWeightUpdate", "UpdateWeights", "FinishWeightUpdate"),
    *("UpdateWeightVersion", "GetWeightVersion", "Health", "Models", "Config", "Queue", "Ledger"),
    *("Requests", "WorldSize", "Pause", "Drain", "Resume", "ReloadModel", "Wake", "LogLevel"),
    *("ResetPrefixCache", "Profile", "Weights", "LoadModel", "UnloadModel"),
)
GRPC_CODES = (
    *("OK", "CANCELLED", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "PERMISSION_DENIED"),
    *("RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE"),
    "UNAUTHENTICATED",
)
