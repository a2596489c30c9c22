//! A small homeserver.
