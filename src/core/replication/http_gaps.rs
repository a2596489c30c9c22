//! How are rows fetched that only their writer's memory holds?
//!
//! `GET /_synapse/replication/get_repl_stream_updates/<stream>/<txn>` on the writer's replication listener.

use std::{fmt::Write, time::Duration};

use rand::{RngExt, SeedableRng, rngs::StdRng};
use reqwest::Client;
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::{
    config::{Replication, ReplicationEndpoint, Secret},
    core::{
        id::{InstanceName, Token},
        replication::gap::{Fetch, FetchError, Group, Page},
    },
};

/// For one request, as Synapse's workers wait.
const TIMEOUT: Duration = Duration::from_mins(1);

/// The largest answer read, bytes. The main process answers with all it has: five minutes of EDUs.
const MAX_ANSWER: usize = 256 * 1024 * 1024;

/// Why an answer was no use.
#[derive(Debug, thiserror::Error)]
enum HttpGapError {
    #[error("instance_map does not say where {0} listens")]
    UnknownInstance(InstanceName),
    #[error("the answer is larger than {MAX_ANSWER} bytes")]
    TooLarge,
    /// 500 is what a wrong `worker_replication_secret` gets.
    #[error("answered {0}")]
    Status(u16),
}

/// The replication listeners of other processes.
#[derive(Debug)]
pub struct HttpGaps {
    endpoints: Vec<(InstanceName, ReplicationEndpoint)>,
    secret: Option<Secret>,
    seed: u64,
}

#[derive(Deserialize)]
struct Answer {
    updates: Vec<(i64, Box<RawValue>)>,
    upto_token: i64,
    limited: bool,
}

impl HttpGaps {
    /// The listeners of `instance_map`. `seed` must differ from start to start: transaction ids are made from it.
    #[must_use]
    pub fn new(replication: &Replication, seed: u64) -> Self {
        Self {
            endpoints: replication.instance_map.clone(),
            secret: replication.secret.clone(),
            seed,
        }
    }

    /// No listeners: for a process whose other processes keep no rows in memory alone.
    #[must_use]
    pub fn nowhere() -> Self {
        Self {
            endpoints: Vec::new(),
            secret: None,
            seed: 0,
        }
    }

    /// Asks for a page. A second call for the same page uses the same transaction id.
    ///
    /// # Errors
    /// No connection, no answer within 60 s, a status other than 200, an answer that is too large or not understood.
    pub async fn fetch(&self, fetch: &Fetch) -> Result<Page, FetchError> {
        let endpoint = self.endpoints.iter().find(|(name, _)| *name == fetch.writer);
        let Some((_, endpoint)) = endpoint else {
            return Err(HttpGapError::UnknownInstance(fetch.writer.clone()).into());
        };
        // reqwest wants a process-wide provider of cryptography; that there is one already is fine.
        let _ = rustls::crypto::ring::default_provider().install_default();
        // Gaps of this kind are rare: a client for each keeps no state between them.
        let client = Client::builder().no_proxy().timeout(TIMEOUT);
        let client = client.redirect(reqwest::redirect::Policy::none());
        let (client, base) = match endpoint {
            ReplicationEndpoint::Tcp { host, port, tls } => {
                let scheme = if *tls { "https" } else { "http" };
                let host = if host.contains(':') && !host.starts_with('[') {
                    format!("[{host}]")
                } else {
                    host.clone()
                };
                (client, format!("{scheme}://{host}:{port}"))
            }
            ReplicationEndpoint::Unix(path) => (client.unix_socket(path.clone()), "http://localhost".to_owned()),
        };
        let mut url = base;
        write!(
            url,
            "/_synapse/replication/get_repl_stream_updates/{}/{}?from_token={}&upto_token={}",
            fetch.stream.name(),
            self.transaction_id(fetch),
            fetch.from,
            fetch.to,
        )?;
        let mut request = client.build()?.get(url);
        if let Some(Secret(secret)) = &self.secret {
            request = request.bearer_auth(secret);
        }
        let mut response = request.send().await?;
        if response.status() != 200 {
            return Err(HttpGapError::Status(response.status().as_u16()).into());
        }
        let mut body = Vec::new();
        while let Some(chunk) = response.chunk().await? {
            if body.len() + chunk.len() > MAX_ANSWER {
                return Err(HttpGapError::TooLarge.into());
            }
            body.extend_from_slice(&chunk);
        }
        let answer: Answer = serde_json::from_slice(&body)?;
        Ok(page(answer))
    }

    /// Ten random letters that stand for this page.
    fn transaction_id(&self, fetch: &Fetch) -> String {
        let mut rng = StdRng::seed_from_u64(self.seed ^ fetch.key.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        (0..10).map(|_| char::from(rng.random_range(b'a'..=b'z'))).collect()
    }
}

/// Rows that share a position stand side by side.
fn page(answer: Answer) -> Page {
    let mut groups: Vec<Group> = Vec::new();
    for (token, row) in answer.updates {
        match groups.last_mut() {
            Some(group) if group.token.0 == token => group.rows.push(row),
            _ => groups.push(Group {
                token: Token(token),
                rows: vec![row],
            }),
        }
    }
    Page {
        groups,
        up_to: Token(answer.upto_token),
        limited: answer.limited,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::replication::{memory_log::MemoryLog, stream::Stream};

    #[test]
    fn what_the_writing_side_answers_is_understood() {
        let mut log = MemoryLog::new(Stream::Typing, Token(0));
        for room in 0..101 {
            let row = RawValue::from_string(format!(r#"["!{room}",[]]"#)).unwrap();
            log.push(&format!("!{room}"), row);
        }
        let page_of = |from, to| {
            let text = serde_json::to_string(&log.updates(Token(from), Token(to))).unwrap();
            page(serde_json::from_str(&text).unwrap())
        };
        let first = page_of(0, 101);
        assert_eq!(
            (first.groups.len(), first.up_to, first.limited),
            (100, Token(100), true)
        );
        let last = page_of(100, 101);
        assert_eq!((last.groups.len(), last.up_to, last.limited), (1, Token(101), false));
        assert_eq!(last.groups[0].rows[0].get(), r#"["!100",[]]"#);
    }
}
