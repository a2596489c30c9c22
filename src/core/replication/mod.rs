//! Replication: what the processes of one homeserver tell each other.
