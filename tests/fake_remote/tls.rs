//! A certificate authority for the time of one run, and one certificate for every server in it.

use std::net::{IpAddr, Ipv4Addr};

use anyhow::Result;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    SanType,
};

/// How many addresses the certificate is good for, beside `localhost`: see [`address`].
pub const ADDRESSES: u16 = 750;

/// The loopback address number `n`.
pub fn address(n: u16) -> Ipv4Addr {
    Ipv4Addr::new(
        127,
        1,
        u8::try_from(n / 250).unwrap_or(u8::MAX),
        u8::try_from(n % 250 + 1).unwrap_or(u8::MAX),
    )
}

/// PEM texts.
pub struct Certificates {
    /// The authority, for clients to trust.
    pub authority: String,
    /// The servers' certificate.
    pub certificate: String,
    /// Its key.
    pub key: String,
}

impl Certificates {
    pub fn new() -> Result<Self> {
        let mut params = CertificateParams::new(vec![])?;
        // Two names, or OpenSSL takes the servers' certificate for a self-signed one.
        params.distinguished_name.push(DnType::CommonName, "test authority");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        let authority_key = KeyPair::generate()?;
        let authority = params.self_signed(&authority_key)?.pem();
        let issuer = Issuer::new(params, authority_key);

        let mut params = CertificateParams::new(vec!["localhost".to_owned()])?;
        params.distinguished_name.push(DnType::CommonName, "test servers");
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params
            .subject_alt_names
            .extend((0..ADDRESSES).map(|n| SanType::IpAddress(IpAddr::V4(address(n)))));
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &issuer)?.pem();
        Ok(Self {
            authority,
            certificate,
            key: key.serialize_pem(),
        })
    }
}
