//! What to send, to whom, when.
