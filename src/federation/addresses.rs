//! May this address be connected to? Keeps remote names from steering us into our own network.

use std::net::IpAddr;

use crate::config::AddressRanges;

/// Why an address, or all addresses of a name, are not connected to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("address {0} is denied by ip_range_blacklist")]
pub struct Blocked(pub IpAddr);

/// Checks addresses against the configured ranges.
#[derive(Debug, Clone)]
pub struct AddressFilter(AddressRanges);

impl AddressFilter {
    /// A filter by `ranges`.
    #[must_use]
    pub fn new(ranges: AddressRanges) -> Self {
        Self(ranges)
    }

    /// Checks an address that stands in a server's name itself. Exceptions do not hold for it, as in Synapse: they are
    /// for hosts that the operator knows by name.
    ///
    /// # Errors
    /// When it is denied.
    pub fn check_literal(&self, address: IpAddr) -> Result<(), Blocked> {
        if self.is_denied(address) {
            Err(Blocked(address))
        } else {
            Ok(())
        }
    }

    /// Checks all addresses that a name resolved to. One that is denied rejects them all, for the name's owner is up to
    /// something.
    ///
    /// # Errors
    /// When one of them is denied.
    pub fn check_resolved(&self, addresses: impl IntoIterator<Item = IpAddr>) -> Result<(), Blocked> {
        let mut addresses = addresses.into_iter();
        addresses
            .find(|address| self.is_denied(*address) && !self.is_allowed(*address))
            .map_or(Ok(()), |a| Err(Blocked(a)))
    }

    fn is_denied(&self, address: IpAddr) -> bool {
        contains(&self.0.deny, address)
    }

    fn is_allowed(&self, address: IpAddr) -> bool {
        contains(&self.0.allow, address)
    }
}

fn contains(ranges: &[ipnet::IpNet], address: IpAddr) -> bool {
    // `::ffff:a.b.c.d` is the same host as `a.b.c.d`.
    let canonical = address.to_canonical();
    ranges
        .iter()
        .any(|range| range.contains(&address) || range.contains(&canonical))
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use proptest::prelude::*;

    use super::*;

    fn filter(deny: &[&str], allow: &[&str]) -> AddressFilter {
        let ranges = |list: &[&str]| list.iter().map(|range| range.parse().unwrap()).collect();
        AddressFilter::new(AddressRanges {
            deny: ranges(deny),
            allow: ranges(allow),
        })
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn one_denied_address_rejects_the_name() {
        let filter = filter(&["10.0.0.0/8", "::1/128"], &[]);
        assert_eq!(filter.check_resolved([ip("1.1.1.1"), ip("2001:db8::1")]), Ok(()));
        assert_eq!(
            filter.check_resolved([ip("1.1.1.1"), ip("10.9.9.9")]),
            Err(Blocked(ip("10.9.9.9")))
        );
        assert_eq!(filter.check_resolved([ip("::1")]), Err(Blocked(ip("::1"))));
    }

    #[test]
    fn exceptions_hold_for_names_and_not_for_literals() {
        let filter = filter(&["10.0.0.0/8"], &["10.1.0.0/16"]);
        assert_eq!(filter.check_resolved([ip("10.1.2.3"), ip("1.1.1.1")]), Ok(()));
        assert_eq!(
            filter.check_resolved([ip("10.1.2.3"), ip("10.2.0.0")]),
            Err(Blocked(ip("10.2.0.0")))
        );
        assert_eq!(filter.check_literal(ip("10.1.2.3")), Err(Blocked(ip("10.1.2.3"))));
        assert_eq!(filter.check_literal(ip("1.1.1.1")), Ok(()));
    }

    proptest! {
        #[test]
        fn a_mapped_address_fares_like_the_one_it_stands_for(bits in any::<u32>(), deny in 0_u8..=32, allow in 0_u8..=32) {
            let address = Ipv4Addr::from(bits);
            let range = |length: u8| format!("{}/{length}", Ipv4Addr::from(bits ^ 1));
            let filter = filter(&[&range(deny)], &[&range(allow)]);
            let mapped = IpAddr::V6(address.to_ipv6_mapped());
            let address = IpAddr::V4(address);
            prop_assert_eq!(filter.check_literal(address).is_ok(), filter.check_literal(mapped).is_ok());
            prop_assert_eq!(filter.check_resolved([address]).is_ok(), filter.check_resolved([mapped]).is_ok());
        }
    }
}
