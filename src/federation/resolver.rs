//! Which addresses does a name stand for, and may they be used? The very answer that is connected to is checked, so a name
//! cannot show one address to the check and another to the connection.

use std::{net::SocketAddr, sync::Arc};

use reqwest::dns::{Addrs, Name, Resolve, Resolving};

use super::addresses::AddressFilter;

/// The system's resolver (`/etc/hosts` included) behind the address filter.
pub(super) struct FilteringResolver(pub(super) Arc<AddressFilter>);

impl Resolve for FilteringResolver {
    fn resolve(&self, name: Name) -> Resolving {
        let filter = Arc::clone(&self.0);
        Box::pin(async move {
            // Port 0: the URL's port counts.
            let found: Vec<SocketAddr> = tokio::net::lookup_host((name.as_str(), 0)).await?.collect();
            filter.check_resolved(found.iter().map(SocketAddr::ip))?;
            Ok(Box::new(found.into_iter()) as Addrs)
        })
    }
}
