//! Events: from what the database stores to the bytes of a PDU.
