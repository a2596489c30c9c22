//! Tables that others follow by asking: what has come after the position that I saw last?
//!
//! [`table`] is what can be followed, [`memory`] such a table for what is in no database (presence, typing, a sender's
//! view of its destinations). [`request`] reads what is asked, [`answer`] puts rows into an answer and cuts it where it
//! must end; neither does I/O. [`long_poll`] waits for news and reads the tables. `docs/replication-api.md` describes the
//! whole from outside.

mod answer;
pub mod long_poll;
pub mod memory;
pub mod request;
mod streams;
pub mod table;

pub use long_poll::{AskError, Feed};
pub use memory::{MemoryTable, Record};
pub use request::{Request, RequestError};
pub use table::{Bell, Row, Table, TableError};
