//! Pure decisions of mooncake_serve: eviction policies, route scoring and a simulator that runs both.
