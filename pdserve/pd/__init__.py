"""The prefill/decode data path: protocols, worker registry, relay. Knows neither recipes nor processes."""
