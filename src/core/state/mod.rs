//! Room state: who is in a room before an event, and which servers a change added.
