//! A certificate authority for the time of one test, and a certificate for 127.0.0.1.

use std::net::{IpAddr, Ipv4Addr};

use burdock::master::Certificate;
use rcgen::{BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, SanType};

/// The authority's certificate, and one for every server (they differ in their ports only).
#[derive(Clone)]
pub struct Certificates {
    pub authority: Vec<u8>,
    pub servers: Certificate,
}

impl Certificates {
    pub fn new() -> Self {
        let mut params = CertificateParams::new(vec![]).expect("no names");
        params.distinguished_name.push(DnType::CommonName, "test authority");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("a key");
        let authority = params.self_signed(&key).expect("signed").pem();
        let issuer = Issuer::new(params, key);

        let mut params = CertificateParams::new(vec![]).expect("no names");
        params.distinguished_name.push(DnType::CommonName, "test servers");
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params
            .subject_alt_names
            .push(SanType::IpAddress(IpAddr::V4(Ipv4Addr::LOCALHOST)));
        let key = KeyPair::generate().expect("a key");
        let chain = params.signed_by(&key, &issuer).expect("signed").pem();
        Self {
            authority: authority.into_bytes(),
            servers: Certificate {
                chain: chain.into_bytes(),
                key: key.serialize_pem().into_bytes(),
            },
        }
    }
}
