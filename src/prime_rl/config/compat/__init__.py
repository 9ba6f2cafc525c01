"""Other spellings: keys of earlier generations (`table`), and the names that vLLM has for ours."""
