//! How is one request brought to one remote server? Signing, the connection, time limits, and reading what comes back.
//!
//! One call is one try; when to try again is the caller's business.

mod ask;
mod failure;
#[cfg(test)]
mod tests;

use std::{collections::HashSet, sync::Arc, time::Duration};

use bytes::Bytes;
use reqwest::{
    Method, Response, Url,
    header::{AUTHORIZATION, CONTENT_TYPE, HOST, RETRY_AFTER},
};
use tokio::time::{Instant, timeout, timeout_at};

pub use self::ask::{AskError, Question, Verb};
use self::failure::Failure;
use super::{
    addresses::AddressFilter,
    gate::{Gate, holding},
    outcome::{EventProbe, Outcome, Stage},
    server_name::{Denied, Host, Target},
    tls::Clients,
    transaction::Body,
    x_matrix::Signed,
};
use crate::{
    config::Federation,
    core::{
        id::{EventId, ServerName},
        signing::SigningKey,
    },
};

/// Longest answer to a transaction that is read, bytes. It lists at most 50 PDUs, so there is room for 20 KB of error text
/// for each; a hostile server can have us hold no more than this for each try in flight.
const MAX_ANSWER_BYTES: usize = 1024 * 1024;

/// Longest answer of which only the error code counts, bytes.
const MAX_ERROR_BYTES: usize = 64 * 1024;

/// Why there can be no client with these settings.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// A file of `federation_custom_ca_list` is not PEM.
    #[error("federation_custom_ca_list: a file cannot be read as PEM certificates: {0}")]
    CustomCa(reqwest::Error),
    /// A file of `federation_custom_ca_list` holds no certificate.
    #[error("federation_custom_ca_list: a file holds no certificate")]
    EmptyCustomCa,
    /// TLS cannot be set up; as a rule because the system has no root certificates.
    #[error("TLS cannot be set up (are the system's CA certificates installed?): {}", failure::chain_text(.0))]
    Tls(reqwest::Error),
}

/// Talks to other homeservers. A clone shares its connections.
#[derive(Clone)]
pub struct Client(Arc<Inner>);

struct Inner {
    origin: ServerName,
    key: SigningKey,
    whitelist: Option<HashSet<ServerName>>,
    filter: Arc<AddressFilter>,
    timeout: Duration,
    clients: Clients,
    gate: Gate,
}

impl Client {
    /// A client that signs as `origin` with `key` and sets up at most `max_connecting` connections at once.
    ///
    /// # Errors
    /// When the TLS settings cannot be used.
    pub fn new(
        origin: ServerName,
        key: SigningKey,
        settings: &Federation,
        max_connecting: usize,
    ) -> Result<Self, ClientError> {
        let filter = Arc::new(AddressFilter::new(settings.address_filter.clone()));
        Ok(Self(Arc::new(Inner {
            origin,
            key,
            whitelist: settings
                .domain_whitelist
                .as_ref()
                .map(|names| names.iter().cloned().collect()),
            clients: Clients::new(settings, &filter)?,
            filter,
            timeout: settings.timeout,
            gate: Gate::new(max_connecting, Instant::now()),
        })))
    }

    /// Why nothing is ever sent to that server; `None` if it may be. Does no I/O.
    #[must_use]
    pub fn denied(&self, name: &ServerName) -> Option<Denied> {
        if *name == self.0.origin {
            Some(Denied::Ourselves)
        } else if self.0.whitelist.as_ref().is_some_and(|names| !names.contains(name)) {
            Some(Denied::NotWhitelisted)
        } else {
            Target::of(name).err()
        }
    }

    /// One try to send a transaction.
    pub async fn send(&self, destination: &ServerName, txn_id: &str, body: &Body) -> Outcome {
        let path = format!("/_matrix/federation/v1/send/{txn_id}");
        let limit = self.0.timeout;
        match self
            .exchange(
                destination,
                Method::PUT,
                &path,
                Some(body.bytes()),
                MAX_ANSWER_BYTES,
                limit,
            )
            .await
        {
            Ok(Answer {
                status,
                body: Err(detail),
                ..
            }) if is_success(status) => Outcome::Unreadable { status, detail },
            Ok(Answer {
                status,
                content_type,
                body: Ok(body),
                ..
            }) if is_success(status) => Outcome::of_success(status, content_type.as_deref(), &body),
            Ok(answer) => {
                let body = answer.body.unwrap_or_default();
                Outcome::of_refusal(answer.status, answer.retry_after.as_deref(), &body)
            }
            Err(Failure { stage, detail }) => Outcome::Failed { stage, detail },
        }
    }

    /// Asks a server for an event, to learn whether it has it. One try, which takes `limit` at most.
    pub async fn has_event(&self, destination: &ServerName, event_id: &EventId, limit: Duration) -> EventProbe {
        let path = format!("/_matrix/federation/v1/event/{}", percent_encoded(event_id.as_str()));
        match self
            .exchange(destination, Method::GET, &path, None, MAX_ERROR_BYTES, limit)
            .await
        {
            Ok(answer) => EventProbe::of_answer(answer.status, &answer.body.unwrap_or_default()),
            Err(Failure { stage, detail }) => EventProbe::NoAnswer(format!("{stage:?}: {detail}")),
        }
    }

    /// One request and what was answered within `limit`; of a success at most `max` bytes are read.
    async fn exchange(
        &self,
        destination: &ServerName,
        method: Method,
        path: &str,
        body: Option<&Bytes>,
        max: usize,
        limit: Duration,
    ) -> Result<Answer, Failure> {
        let client = &*self.0;
        if let Some(denied) = self.denied(destination) {
            return Err(Failure::new(Stage::Lookup, denied));
        }
        let request = client.request(destination, method, path, body)?;

        let warm = client.gate.is_warm(destination, Instant::now());
        let permit = if warm {
            None
        } else {
            client.gate.permit(destination, Instant::now()).await
        };
        let limit = limit.min(client.timeout);
        let deadline = Instant::now() + limit;
        let head = timeout_at(deadline, async {
            match request.send().await {
                // The server may have closed an idle connection in the same moment as we used it. The request is safe to
                // repeat: a transaction by its id, the other because it only reads.
                Err(error) if warm && failure::connection_died(&error) => request.send().await,
                result => result,
            }
        });
        let head = match holding(permit, head).await {
            Ok(Ok(response)) => Ok(response),
            Ok(Err(error)) => Err(Failure::of(error)),
            Err(_) => Err(Failure::new(Stage::Timeout, format_args!("no answer within {limit:?}"))),
        };
        let answer = match head {
            Ok(response) => Ok(Answer::read(response, max, limit).await),
            Err(failure) => Err(failure),
        };
        let pooled = answer.as_ref().is_ok_and(|answer| answer.body.is_ok());
        client.gate.note(destination, pooled, Instant::now());
        answer
    }
}

impl Inner {
    fn request<'a>(
        &'a self,
        destination: &'a ServerName,
        method: Method,
        path: &str,
        body: Option<&Bytes>,
    ) -> Result<Request<'a>, Failure> {
        let lookup = |error: &dyn std::fmt::Display| Failure::new(Stage::Lookup, error);
        let target = Target::of(destination).map_err(|denied| lookup(&denied))?;
        if let Host::Address(address) = target.host {
            // Nothing is looked up for an address, so the resolver's check does not see it.
            self.filter.check_literal(address).map_err(|blocked| lookup(&blocked))?;
        }
        let url = format!("https://{}:{}{path}", target.host.in_url(), target.port);
        let url = Url::parse(&url).map_err(|error| lookup(&error))?;
        let uri = match url.query() {
            Some(query) => &format!("{}?{query}", url.path()),
            None => url.path(),
        };
        let authorization = Signed {
            origin: &self.origin,
            destination,
            method: method.as_str(),
            uri,
            content: body.map(AsRef::as_ref),
        };
        Ok(Request {
            client: self.clients.for_name(&target.host.in_certificate()),
            destination,
            authorization: authorization.authorization(&self.key),
            method,
            url,
            body: body.cloned(),
        })
    }
}

/// A signed request, to be sent once or twice.
struct Request<'a> {
    client: &'a reqwest::Client,
    destination: &'a ServerName,
    authorization: String,
    method: Method,
    url: Url,
    body: Option<Bytes>,
}

impl Request<'_> {
    async fn send(&self) -> Result<Response, reqwest::Error> {
        let mut request = self
            .client
            .request(self.method.clone(), self.url.clone())
            // The URL always names a port, the Host header only if the server's name does.
            .header(HOST, self.destination.as_str())
            .header(AUTHORIZATION, &self.authorization);
        if let Some(body) = &self.body {
            request = request.header(CONTENT_TYPE, "application/json").body(body.clone());
        }
        request.send().await
    }
}

/// What was answered.
struct Answer {
    status: u16,
    content_type: Option<Vec<u8>>,
    retry_after: Option<Vec<u8>>,
    /// The body, or why it could not be read.
    body: Result<Vec<u8>, String>,
}

impl Answer {
    async fn read(response: Response, max_success: usize, time: Duration) -> Self {
        let header = |name| response.headers().get(name).map(|value| value.as_bytes().to_vec());
        let status = response.status().as_u16();
        let (content_type, retry_after) = (header(CONTENT_TYPE), header(RETRY_AFTER));
        let max = if is_success(status) {
            max_success
        } else {
            MAX_ERROR_BYTES
        };
        let body = match timeout(time, read_body(response, max)).await {
            Ok(body) => body,
            Err(_) => Err(format!("the body did not arrive within {time:?}")),
        };
        Self {
            status,
            content_type,
            retry_after,
            body,
        }
    }
}

/// The body, if it is at most `max` bytes. What is left unread closes the connection.
async fn read_body(mut response: Response, max: usize) -> Result<Vec<u8>, String> {
    let too_large = || Err(format!("the body is larger than {max} bytes"));
    if response.content_length().is_some_and(|length| length > max as u64) {
        return too_large();
    }
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(|error| Failure::of(error).detail)? {
        if body.len() + chunk.len() > max {
            return too_large();
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body)
}

fn is_success(status: u16) -> bool {
    (200..300).contains(&status)
}

/// `text` as one segment of a URL's path, or one value of its query.
#[must_use]
pub fn percent_encoded(text: &str) -> String {
    use std::fmt::Write;
    text.bytes()
        .fold(String::with_capacity(text.len() + 8), |mut out, byte| {
            if byte.is_ascii_alphanumeric() || b"-_~".contains(&byte) {
                out.push(char::from(byte));
            } else {
                let _ = write!(out, "%{byte:02X}");
            }
            out
        })
}
