"""Methods around or across other methods: fused, refined, averaged."""
