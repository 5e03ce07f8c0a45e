def AsyncEngineArgs(**args): return args
