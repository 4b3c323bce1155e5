"""The accuracy gate of `pdserve eval`: lm-evaluation-harness asks the deployment, and its score has to reach a
threshold."""
