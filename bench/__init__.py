"""The harness: specification in, record out, verdict on records."""
