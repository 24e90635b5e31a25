"""Methods that combine other methods: fused, refined, averaged."""
