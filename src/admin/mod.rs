//! What operators and machines ask of a running process: health and metrics.
