"""Names and numbers of other toolkits over camscope's explainers, for scripts that change one import."""
