//! Which addresses are never connected to: Synapse's lists of ranges, with each IPv4 range in its IPv6 disguises.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use super::{AddressRanges, error::ConfigError, node::Node, yaml::Layers};

/// Synapse's default for `ip_range_blacklist`: what is not on the public internet.
const PRIVATE: [&str; 19] = [
    "127.0.0.0/8",
    "10.0.0.0/8",
    "172.16.0.0/12",
    "192.168.0.0/16",
    "100.64.0.0/10",
    "192.0.0.0/24",
    "169.254.0.0/16",
    "192.88.99.0/24",
    "198.18.0.0/15",
    "192.0.2.0/24",
    "198.51.100.0/24",
    "203.0.113.0/24",
    "224.0.0.0/4",
    "::1/128",
    "fe80::/10",
    "fc00::/7",
    "2001:db8::/32",
    "ff00::/8",
    "fec0::/10",
];

pub(super) fn read(layers: &Layers) -> Result<AddressRanges, ConfigError> {
    let mut ranges = AddressRanges::default();
    if let Some(deny) = list(&layers.get("federation_ip_range_blacklist"))? {
        ranges.deny = deny;
    } else {
        ranges.deny = match list(&layers.get("ip_range_blacklist"))? {
            Some(deny) => deny,
            None => PRIVATE
                .iter()
                .filter_map(|range| parse(range))
                .flat_map(disguises)
                .collect(),
        };
        ranges.allow = list(&layers.get("ip_range_whitelist"))?.unwrap_or_default();
    }
    // Connecting to these reaches this very machine, whatever the lists say.
    ranges
        .deny
        .extend(disguises(IpAddr::from(Ipv4Addr::UNSPECIFIED).into()));
    ranges.deny.push(IpAddr::from(Ipv6Addr::UNSPECIFIED).into());
    ranges.deny.sort_unstable();
    ranges.deny.dedup();
    Ok(ranges)
}

fn list(node: &Node<'_>) -> Result<Option<Vec<IpNet>>, ConfigError> {
    let Some(texts) = node.texts()? else {
        return Ok(None);
    };
    let mut ranges = Vec::new();
    for text in texts {
        let range = parse(&text).ok_or_else(|| {
            node.error(
                format!("holds {text:?}, which is no range of addresses"),
                "Write ranges like `10.0.0.0/8` or `fe80::/10`",
            )
        })?;
        ranges.extend(disguises(range));
    }
    Ok(Some(ranges))
}

fn parse(text: &str) -> Option<IpNet> {
    let range = text
        .parse::<IpNet>()
        .or_else(|_| text.parse::<IpAddr>().map(IpNet::from));
    range.ok().map(|range| range.trunc())
}

/// The range itself, and for IPv4 its compatible, mapped and 6to4 forms in IPv6.
fn disguises(range: IpNet) -> Vec<IpNet> {
    let mut forms = vec![range];
    if let IpNet::V4(v4) = range {
        forms.extend(
            [compatible(v4), mapped(v4), six_to_four(v4)]
                .into_iter()
                .flatten()
                .map(IpNet::V6),
        );
    }
    forms
}

fn compatible(range: Ipv4Net) -> Option<Ipv6Net> {
    let bits = u128::from(range.network().to_bits());
    Ipv6Net::new(Ipv6Addr::from_bits(bits), 96 + range.prefix_len()).ok()
}

fn mapped(range: Ipv4Net) -> Option<Ipv6Net> {
    Ipv6Net::new(range.network().to_ipv6_mapped(), 96 + range.prefix_len()).ok()
}

fn six_to_four(range: Ipv4Net) -> Option<Ipv6Net> {
    let bits = (0x2002 << 112) | (u128::from(range.network().to_bits()) << 80);
    Ipv6Net::new(Ipv6Addr::from_bits(bits), 16 + range.prefix_len()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ipv4_range_stands_for_its_ipv6_forms() {
        let forms = disguises(parse("10.1.2.3/8").expect("a range"));
        let texts: Vec<String> = forms.iter().map(ToString::to_string).collect();
        assert_eq!(
            texts,
            ["10.0.0.0/8", "::a00:0/104", "::ffff:10.0.0.0/104", "2002:a00::/24"]
        );
    }

    #[test]
    fn every_default_range_is_read() {
        assert!(PRIVATE.iter().all(|range| parse(range).is_some()));
    }

    #[test]
    fn single_addresses_are_ranges_and_other_things_are_not() {
        assert_eq!(parse("1.2.3.4").map(|r| r.to_string()).as_deref(), Some("1.2.3.4/32"));
        assert_eq!(parse("10/8"), None);
        assert_eq!(parse("example.com"), None);
    }
}
