//! Which connections are made, with whom, and how many.

use rustls::{ALL_VERSIONS, version::TLS12};
use tokio::time::timeout;

use super::{
    ORIGIN, body, client, key, ok, pair,
    remote::{Authority, Remote, Reply, SHORT, mute},
    settings, stage,
};
use crate::{
    config::Federation,
    core::id::ServerName,
    federation::{
        client::{Client, ClientError},
        outcome::{Outcome, Stage},
    },
};

#[tokio::test]
async fn denied_addresses_are_not_connected_to() {
    let authority = Authority::new();
    let remote = Remote::start(authority.server("localhost", ALL_VERSIONS), |_| ok()).await;
    let mut settings = settings(&authority);
    let localhost = format!("localhost:{}", remote.port).into();
    assert!(matches!(
        client(&settings).send(&localhost, "1", &body()).await,
        Outcome::Accepted(_)
    ));
    assert_eq!(remote.last().header("host"), Some(localhost.as_str()));

    settings.address_filter.deny = ["127.0.0.0/8", "::1/128"].map(|range| range.parse().unwrap()).to_vec();
    let filtered = client(&settings);
    for name in [
        localhost.clone(),
        format!("127.0.0.1:{}", remote.port).into(),
        "[::1]:1".into(),
        "[::ffff:127.0.0.1]".into(),
    ] {
        let outcome = filtered.send(&name, "1", &body()).await;
        assert_eq!(stage(&outcome), Stage::Lookup, "{name}");
        assert!(
            format!("{outcome:?}").contains("denied by ip_range_blacklist"),
            "{outcome:?}"
        );
    }
    assert_eq!(remote.connections(), 1);

    settings.address_filter.allow = settings.address_filter.deny.clone();
    let excepted = client(&settings);
    assert!(matches!(
        excepted.send(&localhost, "1", &body()).await,
        Outcome::Accepted(_)
    ));
    assert_eq!(
        stage(
            &excepted
                .send(&format!("127.0.0.1:{}", remote.port).into(), "1", &body())
                .await
        ),
        Stage::Lookup
    );
}

#[tokio::test]
async fn certificates_must_be_for_the_name_and_from_a_trusted_root() {
    let authority = Authority::new();
    let remote = Remote::start(authority.server("127.0.0.1", ALL_VERSIONS), |_| ok()).await;
    let name = |host: &str| ServerName::from(format!("{host}:{}", remote.port));
    let trusting = settings(&authority);
    let accepts = async |settings: &Federation, host: &str| match client(settings).send(&name(host), "1", &body()).await
    {
        Outcome::Accepted(_) => true,
        outcome => {
            assert_eq!(stage(&outcome), Stage::Tls, "{outcome:?}");
            false
        }
    };
    assert!(accepts(&trusting, "127.0.0.1").await);
    assert!(
        !accepts(&trusting, "localhost").await,
        "the certificate is for another name"
    );
    let strange = Federation {
        custom_ca: Some(vec![Authority::new().pem()]),
        ..trusting.clone()
    };
    assert!(!accepts(&strange, "127.0.0.1").await, "another root");

    let unverified = Federation {
        unverified_names: vec!["LOCAL*".to_owned()],
        ..strange.clone()
    };
    assert!(accepts(&unverified, "localhost").await);
    assert!(!accepts(&unverified, "127.0.0.1").await);
    let off = Federation {
        verify_certificates: false,
        ..strange
    };
    assert!(accepts(&off, "localhost").await && accepts(&off, "127.0.0.1").await);
}

#[tokio::test]
async fn the_minimum_tls_version_holds() {
    let authority = Authority::new();
    let remote = Remote::start(authority.server("127.0.0.1", &[&TLS12]), |_| ok()).await;
    let name = format!("127.0.0.1:{}", remote.port).into();
    let settings = settings(&authority);
    assert!(matches!(
        client(&settings).send(&name, "1", &body()).await,
        Outcome::Accepted(_)
    ));
    let strict = client(&Federation {
        tls_1_3_only: true,
        ..settings
    });
    assert_eq!(stage(&strict.send(&name, "1", &body()).await), Stage::Tls);
}

#[tokio::test]
async fn unusable_roots_are_an_error_at_the_start() {
    let with = |custom_ca: &[u8]| {
        let settings = Federation {
            custom_ca: Some(vec![custom_ca.to_vec()]),
            ..settings(&Authority::new())
        };
        Client::new(ORIGIN.into(), key(), &settings, 1).err().unwrap()
    };
    assert!(matches!(with(b""), ClientError::EmptyCustomCa));
    assert!(matches!(
        with(b"-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n"),
        ClientError::CustomCa(_) | ClientError::EmptyCustomCa
    ));
}

#[tokio::test]
async fn a_connection_that_cannot_be_made_is_told_from_one_that_broke() {
    let (client, remote, name) = pair(|_| Reply::Close).await;
    assert_eq!(stage(&client.send(&name, "1", &body()).await), Stage::Http);
    assert_eq!(remote.connections(), 1, "a new connection that breaks is a failed try");
    let unused = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    assert_eq!(
        stage(&client.send(&unused.to_string().as_str().into(), "1", &body()).await),
        Stage::Connect
    );
}

#[tokio::test]
async fn a_pooled_connection_that_died_is_replaced_at_once() {
    let (client, remote, name) = pair(|seen| if seen.turn == 0 { ok() } else { Reply::Close }).await;
    for id in ["1", "2", "3"] {
        assert!(
            matches!(client.send(&name, id, &body()).await, Outcome::Accepted(_)),
            "{id}"
        );
    }
    // Each but the first request came twice: on the old connection, which closed, and on a new one.
    let seen = remote.seen.lock();
    let came: Vec<_> = seen.iter().map(|seen| (seen.connection, seen.turn)).collect();
    assert_eq!(came, [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]);
    assert_eq!((&seen[1].head, &seen[1].body), (&seen[2].head, &seen[2].body));
}

#[tokio::test]
async fn setup_is_bounded_and_warm_connections_need_no_permit() {
    let authority = Authority::new();
    let warm = Remote::start(authority.server("127.0.0.1", ALL_VERSIONS), |_| ok()).await;
    let cold = Remote::start(authority.server("127.0.0.1", ALL_VERSIONS), |_| ok()).await;
    let (mute, task) = mute().await;
    let name = |port: u16| ServerName::from(format!("127.0.0.1:{port}"));
    let client = Client::new(ORIGIN.into(), key(), &settings(&authority), 1).unwrap();
    assert!(matches!(
        client.send(&name(warm.port), "1", &body()).await,
        Outcome::Accepted(_)
    ));

    let stuck = tokio::spawn({
        let client = client.clone();
        async move { client.send(&name(mute), "2", &body()).await }
    });
    tokio::task::yield_now().await;
    assert!(
        timeout(SHORT, client.send(&name(cold.port), "3", &body()))
            .await
            .is_err(),
        "the one permit is taken"
    );
    assert_eq!(cold.connections(), 0);
    assert!(matches!(
        client.send(&name(warm.port), "4", &body()).await,
        Outcome::Accepted(_)
    ));
    stuck.abort();
    assert!(matches!(
        client.send(&name(cold.port), "5", &body()).await,
        Outcome::Accepted(_)
    ));
    task.abort();
}
