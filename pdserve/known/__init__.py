"""What is known of each version of vllm, lmcache and mooncake: defects, patches, flags. Data, and one list of it."""
