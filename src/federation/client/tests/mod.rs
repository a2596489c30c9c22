//! The client against servers on real sockets with real TLS.

mod connections;
mod remote;

use base64::{Engine, engine::general_purpose::STANDARD_NO_PAD};
use rustls::ALL_VERSIONS;
use serde_json::{Value as Json, json};

use self::remote::{Authority, Remote, Reply, SHORT};
use super::*;
use crate::{config::AddressRanges, core::clock::Millis};

const ORIGIN: &str = "origin.example.com";

const LIMIT: std::time::Duration = std::time::Duration::from_secs(5);

fn key() -> SigningKey {
    SigningKey::from_seed("a_test", &std::array::from_fn(|i| u8::try_from(i).unwrap()))
}

fn settings(authority: &Authority) -> Federation {
    Federation {
        domain_whitelist: None,
        address_filter: AddressRanges::default(),
        verify_certificates: true,
        unverified_names: Vec::new(),
        custom_ca: Some(vec![authority.pem()]),
        tls_1_3_only: false,
        timeout: Duration::from_secs(20),
    }
}

fn client(settings: &Federation) -> Client {
    Client::new(ORIGIN.into(), key(), settings, 16).unwrap()
}

fn body() -> Body {
    Body::build(&ORIGIN.into(), Millis(1), &[Bytes::from_static(b"{\"a\":1}")])
}

/// A client, and a server for `127.0.0.1` that it trusts.
async fn pair(answer: impl Fn(&remote::Seen) -> Reply + Send + Sync + 'static) -> (Client, Remote, ServerName) {
    pair_with(|_| (), answer).await
}

async fn pair_with(
    change: impl FnOnce(&mut Federation),
    answer: impl Fn(&remote::Seen) -> Reply + Send + Sync + 'static,
) -> (Client, Remote, ServerName) {
    let authority = Authority::new();
    let mut settings = settings(&authority);
    change(&mut settings);
    let remote = Remote::start(authority.server("127.0.0.1", ALL_VERSIONS), answer).await;
    let name = format!("127.0.0.1:{}", remote.port).into();
    (client(&settings), remote, name)
}

fn ok() -> Reply {
    Reply::json("200 OK", r#"{"pdus":{"$a":{}}}"#)
}

fn stage(outcome: &Outcome) -> Stage {
    match outcome {
        Outcome::Failed { stage, .. } => *stage,
        other => panic!("{other:?}"),
    }
}

/// Checks the request's signature as a receiver would.
fn verify(seen: &remote::Seen, destination: &ServerName) {
    let header = seen.header("authorization").unwrap().strip_prefix("X-Matrix ").unwrap();
    let part = |name: &str| {
        let parts = header.split(',').map(|part| part.split_once('=').unwrap());
        parts
            .clone()
            .find(|(key, _)| *key == name)
            .unwrap()
            .1
            .trim_matches('"')
            .to_owned()
    };
    assert_eq!(
        (part("origin"), part("destination")),
        (ORIGIN.to_owned(), destination.to_string())
    );
    assert_eq!(part("key"), "ed25519:a_test");
    let mut words = seen.head.split(' ');
    let mut signed = json!({
        "method": words.next(), "uri": words.next(), "origin": ORIGIN, "destination": destination.as_str(),
    });
    if !seen.body.is_empty() {
        signed["content"] = serde_json::from_slice(&seen.body).unwrap();
    }
    let public = STANDARD_NO_PAD
        .decode("A6EHv/POEL4dcN0Y50vAmWfk1jCbpQ1fHdyGZBJVMbg")
        .unwrap();
    let public = ed25519_dalek::VerifyingKey::from_bytes(&public.try_into().unwrap()).unwrap();
    let signature = STANDARD_NO_PAD.decode(part("sig")).unwrap();
    let signature = ed25519_dalek::Signature::from_bytes(&signature.try_into().unwrap());
    // serde_json's compact form with sorted keys is canonical for this body.
    public.verify_strict(signed.to_string().as_bytes(), &signature).unwrap();
}

#[tokio::test]
async fn an_accepted_transaction_was_signed_and_sent_as_it_is() {
    let (client, remote, name) = pair(|_| ok()).await;
    let Outcome::Accepted(accepted) = client.send(&name, "00ab-7", &body()).await else {
        panic!("not accepted")
    };
    assert_eq!(
        accepted.results.unwrap().into_iter().collect::<Vec<_>>(),
        [(EventId::from("$a"), None)]
    );
    let seen = remote.last();
    assert_eq!(
        seen.head.lines().next().unwrap(),
        "PUT /_matrix/federation/v1/send/00ab-7 HTTP/1.1"
    );
    assert_eq!(seen.header("host"), Some(name.as_str()));
    assert_eq!(seen.header("content-type"), Some("application/json"));
    assert_eq!(
        seen.header("user-agent"),
        Some(concat!("Burdock/", env!("CARGO_PKG_VERSION")))
    );
    assert_eq!(seen.header("accept-encoding"), None);
    assert_eq!(&seen.body, body().bytes());
    verify(&seen, &name);

    client.send(&name, "00ab-8", &body()).await;
    assert_eq!(
        (remote.connections(), remote.seen.lock().len()),
        (1, 2),
        "the connection is used again"
    );
}

#[tokio::test]
async fn other_statuses_are_refusals() {
    let (client, remote, name) = pair(|seen| match seen.turn {
        0 => Reply::with("429 Too Many", "Retry-After: 3", r#"{"errcode":"M_LIMIT_EXCEEDED"}"#),
        1 => Reply::with("302 Found", "Location: /elsewhere", ""),
        _ => Reply::with("403 Forbidden", "Content-Type: text/html", "<html>"),
    })
    .await;
    let refused = |status, errcode: Option<&str>, seconds: Option<u64>| Outcome::Refused {
        status,
        errcode: errcode.map(str::to_owned),
        retry_after: seconds.map(Duration::from_secs),
    };
    assert_eq!(
        client.send(&name, "1", &body()).await,
        refused(429, Some("M_LIMIT_EXCEEDED"), Some(3))
    );
    assert_eq!(client.send(&name, "2", &body()).await, refused(302, None, None));
    assert_eq!(client.send(&name, "3", &body()).await, refused(403, None, None));
    assert_eq!(remote.seen.lock().len(), 3, "the redirect was not followed");
}

#[tokio::test]
async fn a_success_that_cannot_be_read_is_not_accepted() {
    let endless = || {
        let mut reply =
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n".to_vec();
        let chunk = [b"10000\r\n".to_vec(), vec![b' '; 0x1_0000], b"\r\n".to_vec()].concat();
        reply.extend(chunk.repeat(MAX_ANSWER_BYTES / 0x1_0000 + 1));
        Reply::Stall(reply)
    };
    let (client, _remote, name) =
        pair(
            move |seen| match seen.head.as_bytes()["PUT /_matrix/federation/v1/send/".len()] {
                b'1' => Reply::with("200 OK", "Content-Type: text/plain", "{}"),
                b'2' => Reply::json("200 OK", "[]"),
                b'3' => Reply::Stall(
                    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1048577\r\n\r\n".to_vec(),
                ),
                _ => endless(),
            },
        )
        .await;
    for (id, expected) in [
        ("1", "Content-Type"),
        ("2", "JSON object"),
        ("3", "larger than"),
        ("4", "larger than"),
    ] {
        match client.send(&name, id, &body()).await {
            Outcome::Unreadable { status: 200, detail } => assert!(detail.contains(expected), "{detail}"),
            other => panic!("{id}: {other:?}"),
        }
    }
}

#[tokio::test]
async fn a_long_refusal_is_not_read_to_its_end() {
    let (client, remote, name) = pair(|seen| {
        if seen.connection > 0 {
            return ok();
        }
        let mut reply = b"HTTP/1.1 500 Oh\r\nContent-Length: 100000000\r\n\r\n".to_vec();
        reply.extend(vec![b' '; 100_000]);
        Reply::Stall(reply)
    })
    .await;
    let expected = Outcome::Refused {
        status: 500,
        errcode: None,
        retry_after: None,
    };
    assert_eq!(client.send(&name, "1", &body()).await, expected);
    assert!(matches!(client.send(&name, "2", &body()).await, Outcome::Accepted(_)));
    assert_eq!(remote.connections(), 2);
}

#[tokio::test]
async fn waiting_for_an_answer_ends() {
    let (client, _remote, name) = pair_with(
        |settings| settings.timeout = SHORT,
        |seen| {
            let head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{";
            Reply::Stall(if seen.connection == 0 { Vec::new() } else { head.into() })
        },
    )
    .await;
    assert_eq!(stage(&client.send(&name, "1", &body()).await), Stage::Timeout);
    match client.send(&name, "2", &body()).await {
        Outcome::Unreadable { detail, .. } => assert!(detail.contains("did not arrive"), "{detail}"),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn who_may_be_sent_to() {
    let authority = Authority::new();
    let open = client(&settings(&authority));
    let denied = |client: &Client, name: &str| client.denied(&name.into());
    assert_eq!(denied(&open, "example.com"), None);
    assert_eq!(denied(&open, ORIGIN), Some(Denied::Ourselves));
    assert_eq!(denied(&open, "Origin.example.com"), None, "names are compared exactly");
    assert_eq!(denied(&open, "exa mple.com"), Some(Denied::Grammar));
    let listed = client(&Federation {
        domain_whitelist: Some(vec!["a.com".into()]),
        ..settings(&authority)
    });
    assert_eq!(denied(&listed, "a.com"), None);
    assert_eq!(denied(&listed, "a.com:8448"), Some(Denied::NotWhitelisted));
    let closed = client(&Federation {
        domain_whitelist: Some(Vec::new()),
        ..settings(&authority)
    });
    assert_eq!(denied(&closed, "a.com"), Some(Denied::NotWhitelisted));
    assert_eq!(
        stage(&closed.send(&"127.0.0.1:1".into(), "1", &body()).await),
        Stage::Lookup
    );
}

#[tokio::test]
async fn asking_for_an_event() {
    let (client, remote, name) = pair(|seen| match seen.turn {
        0 => Reply::json("200 OK", r#"{"pdus":[]}"#),
        1 => Reply::json("404 Not Found", r#"{"errcode":"M_NOT_FOUND"}"#),
        _ => Reply::json("403 Forbidden", r#"{"errcode":"M_FORBIDDEN"}"#),
    })
    .await;
    let id = EventId::from("$a/b+c:x.com");
    assert_eq!(client.has_event(&name, &id, LIMIT).await, EventProbe::Known);
    let seen = remote.last();
    assert!(
        seen.head
            .starts_with("GET /_matrix/federation/v1/event/%24a%2Fb%2Bc%3Ax%2Ecom HTTP/1.1\r\n"),
        "{}",
        seen.head
    );
    assert_eq!((seen.header("content-type"), seen.body.len()), (None, 0));
    verify(&seen, &name);
    assert_eq!(client.has_event(&name, &id, LIMIT).await, EventProbe::NotFound);
    assert_eq!(
        client.has_event(&name, &id, LIMIT).await,
        EventProbe::Other("403 M_FORBIDDEN".into())
    );
    assert!(matches!(
        client.has_event(&"a b".into(), &id, LIMIT).await,
        EventProbe::NoAnswer(_)
    ));
}

#[test]
fn answers_are_compared_as_json() {
    // Guards the shortcut that `verify` takes.
    let body: Json = serde_json::from_slice(body().bytes()).unwrap();
    assert_eq!(
        body.to_string(),
        r#"{"origin":"origin.example.com","origin_server_ts":1,"pdus":[{"a":1}]}"#
    );
}
