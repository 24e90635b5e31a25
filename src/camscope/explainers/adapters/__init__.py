"""Methods computed by other packages: captum (extra `captum`) and zennit (extra `lrp`).

The classes can be imported without the package. METHODS contains them only if it is installed; otherwise the
constructor raises MissingExtraError.
"""
