//! How to talk to one remote server.
